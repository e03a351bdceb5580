-- JobSubmitPlugins=lua: this file is job_submit.lua beside slurm.conf. Where a site has its own already, the lines
-- marked with + go there. Without /etc/slurm/memcalc/memcalc.lua every job passes.
local found, memcalc = pcall(dofile, "/etc/slurm/memcalc/memcalc.lua") -- +

function slurm_job_submit(job_desc, part_list, submit_uid)
    if found then -- +
        local answer = memcalc.job_submit(job_desc) -- +
        if answer ~= slurm.SUCCESS then -- +
            return answer -- +
        end -- +
    end -- +
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
